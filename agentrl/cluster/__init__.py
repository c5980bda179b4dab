"""Worker groups: roles in processes, dispatch tables, resource pools, the network guard."""
