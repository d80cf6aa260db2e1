"""New weights into running vLLM servers: transfer beside generation, a pause for the swap alone, and a proof."""
