"""Answer questions and retrieve only when the gate asks for it: `AdaptiveRAG`, its options, and its JSON records."""
