"""Programs that build what lies beside the package. They are no part of the wheel."""
