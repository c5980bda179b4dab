"""Podman, Docker and E2B as sandboxes."""
