"""Talks to one server: the port of a publication, and its implementation over HTTP."""
