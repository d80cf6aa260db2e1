"""TODO rollout_worker/task/tools"""
