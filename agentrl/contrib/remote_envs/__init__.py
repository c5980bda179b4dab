"""An environment as a server over HTTP, and an environment that plays on such a server (docs/remote_environments.md)."""
