"""Preflight: servers, models behind an API and plug-ins of a run are called once before it starts."""
