"""A run on disk and on the screen: its folder, its display, its curve, and the session that joins the parts."""
