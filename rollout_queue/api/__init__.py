"""The queue over HTTP: handlers for each side, access checks, and bounds on connections and bodies."""
