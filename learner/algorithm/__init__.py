"""What is learnt: how rewards become advantages, and what an optimiser step does with them."""
