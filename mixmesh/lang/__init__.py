"""The language of programs: types, text, sharding rules, checks, and the plan that holds a program."""
