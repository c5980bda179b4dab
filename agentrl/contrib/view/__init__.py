"""Events of a run: an index of its episodes, a JSON API over it, and the page that shows them (docs/viewer.md)."""
