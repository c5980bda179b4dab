"""Shared tools of packaged environments and contrib: BM25, SQLite, BFCL calls, task files, chat formats, HTTP servers."""
