"""Writes the pages that come from the code, one module a page: `python -m docs.generate settings`."""
