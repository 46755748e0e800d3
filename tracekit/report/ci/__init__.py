"""What CI systems read: results of checks as SARIF, JUnit, Code Quality, annotations and comments."""
