"""One execution of a job: its directory, its lease, its start and its end."""
