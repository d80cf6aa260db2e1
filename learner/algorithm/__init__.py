"""The algorithm: how rewards become advantages, and advantages a loss. Pure functions of tensors."""
