"""softdb inside other libraries: one module each, imported by its name, never by `import softdb`."""
