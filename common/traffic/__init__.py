"""Links that several kinds of traffic share, and who may use one next."""
