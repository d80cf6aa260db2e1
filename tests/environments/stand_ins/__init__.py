"""Small environments in the form of each library, and servers and programs that stand in for what is not here.

Each asks for 2 + 2, then for 3 + 3, and rewards each right answer with 1. A fault makes it give an image, a reward that
is no number, too much, or nothing at all, after the first answer.
"""
