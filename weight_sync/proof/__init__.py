"""Whether a server computes with the weights that were sent: probes, the rule that judges them, what layers hold."""
