"""Grade the policy's code with a task's unit tests, in separate processes in a sandbox (`grade.py`)."""
