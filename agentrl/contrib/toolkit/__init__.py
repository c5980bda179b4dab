"""BM25 retrieval, SQLite databases, BFCL solutions and foreign forms of tools, which the shelf and other parts of contrib use."""
