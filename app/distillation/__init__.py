"""Teachers, and what they say of a data set: computed once and kept, or asked for as steps need it."""
