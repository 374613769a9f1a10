"""The process's environment: the one place that reads it."""

import os

ENVIRONMENT_PREFIX = "FLOWPATH_"
environment = os.environ  # noqa: TID251 - the one place that reads it
