"""`octavo bench`: how fast a model is in this process, and how fast a server is from outside."""
