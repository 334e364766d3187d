"""What users of other libraries import: each module here needs the library that it is named after."""
