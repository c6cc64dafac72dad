"""Role groups: a method call on a role group goes to all ranks of a service and returns a batch of futures."""
