"""Preflight: servers, models, plug-ins and gold solutions of a run are tried before it starts."""
