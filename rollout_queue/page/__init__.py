"""The files of the page that the queue serves at `/` and that a report holds. They need no build step."""
