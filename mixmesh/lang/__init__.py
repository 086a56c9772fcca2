"""The language of programs: types, text, rules of operators, checks, and the plan that holds a program."""
