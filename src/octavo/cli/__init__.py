"""The command line face: `octavo serve`, `chat`, `complete` and `info`."""
