"""Worker groups: roles in processes, dispatch tables, resource pools, the network guard.

Import from the modules: `worker` (Worker), `dispatch` (strategies), `launch` (launch), `group`
(WorkerGroup), `runtime` (start_ray, stop_ray).
"""
