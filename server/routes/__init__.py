"""HTTP handlers, one file a subject. `server.app` holds the table of paths."""
