"""A probe of model families: which ways of computing rows are right."""
