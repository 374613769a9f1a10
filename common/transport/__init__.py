"""ZeroMQ sockets under FlowPath's conversations; nothing else in the project touches zmq."""
