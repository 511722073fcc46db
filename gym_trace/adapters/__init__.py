"""Objects of other libraries, made from a trace. Each module imports the library it is named for."""
