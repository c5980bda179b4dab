"""BM25 retrieval, SQLite databases and foreign forms of tools and calls, which the shelf and other parts of contrib use."""
