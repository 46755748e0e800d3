"""Changes that may make a training faster: what they are, which of them a recording asks for, and what they bring."""
