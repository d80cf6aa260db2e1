"""TODO learner/hub"""
