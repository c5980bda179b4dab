"""Data that is there already: files of episodes, conversations and preferences, read row by row and kept as token rows."""
