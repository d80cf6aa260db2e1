"""New weights into running vLLM servers: a snapshot of the learner's, its way to each server, and the proof that the
server computes with them."""
