"""BM25 retrieval and SQLite databases, which tools and environments of the shelf use."""
