from hypothesis import settings

# A busy machine must not fail a property by its clock, and a property finds the same every time.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")
