"""The bank over HTTP: the server, its clients and what they say to each other."""
