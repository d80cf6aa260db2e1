"""TODO weight_sync/transports/ipc"""
