"""Which want of which peer is served next. Sans-IO."""
