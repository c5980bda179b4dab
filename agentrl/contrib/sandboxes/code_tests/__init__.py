"""Unit tests as a grader: a task's tests against the policy's code, each in a process of its own, in a sandbox (`grade.py`)."""
