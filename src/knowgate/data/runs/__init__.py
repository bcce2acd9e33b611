"""Label runs: folders of label rows, recorded scores, and the label table that is read from them."""
