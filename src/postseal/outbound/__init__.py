"""From an envelope that is to be sent to its delivery or its dead letter (protocol section 7)."""
