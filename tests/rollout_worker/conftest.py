from hypothesis import settings

# Two shared cores and a first import of torch: how long an example takes says nothing here.
settings.register_profile("shared_machine", deadline=None)
settings.load_profile("shared_machine")
