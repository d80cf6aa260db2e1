"""Decides which server gets which version when.

Each server has its own task, the newest version wins, and only the snapshot holds the learner. `member_state`
decides, purely; the rest makes the calls.
"""
