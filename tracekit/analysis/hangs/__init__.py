"""Why a job hangs: collectives matched over ranks, what each rank waits for, and who is the cause."""
