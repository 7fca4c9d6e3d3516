//! An ONNX model of a few operators, written as protobuf: fields of onnx.proto3.

/// Columns of the input and the output.
pub(crate) const WIDTH: usize = 64;

/// Opset 17 and the IR of its release.
const OPSET: u64 = 17;
const IR: u64 = 8;
/// `TensorProto.FLOAT`.
const FLOAT: u64 = 1;

/// Returns a small model.
pub(crate) fn encoded() -> Vec<u8> {
    with_weights(weight)
}

/// Returns `out = in x a x b x a + c`, for any number of rows. Each product needs a block, as long
/// as no pattern joins them.
fn with_weights(weight: impl Fn(&str, &[usize]) -> Vec<u8>) -> Vec<u8> {
    let nodes = [
        node("MatMul", &["in", "a"], "first"),
        node("MatMul", &["first", "b"], "second"),
        node("MatMul", &["second", "a"], "third"),
        node("Add", &["third", "c"], "out"),
    ];
    let weights =
        [weight("a", &[WIDTH, WIDTH]), weight("b", &[WIDTH, WIDTH]), weight("c", &[WIDTH])];
    let mut graph = ProtoMessage::default();
    nodes.iter().for_each(|node| graph.bytes(1, node));
    graph.bytes(2, b"check");
    weights.iter().for_each(|weight| graph.bytes(5, weight));
    graph.bytes(11, &value("in"));
    graph.bytes(12, &value("out"));
    let mut opset = ProtoMessage::default();
    opset.number(2, OPSET);
    let mut model = ProtoMessage::default();
    model.number(1, IR);
    model.bytes(7, &graph.0);
    model.bytes(8, &opset.0);
    model.0
}

/// `NodeProto`.
fn node(operator: &str, inputs: &[&str], output: &str) -> Vec<u8> {
    let mut node = ProtoMessage::default();
    inputs.iter().for_each(|input| node.bytes(1, input.as_bytes()));
    node.bytes(2, output.as_bytes());
    node.bytes(4, operator.as_bytes());
    node.0
}

/// `TensorProto` of ones.
fn weight(name: &str, shape: &[usize]) -> Vec<u8> {
    let mut tensor = ProtoMessage::default();
    shape.iter().for_each(|&len| tensor.number(1, len as u64));
    tensor.number(2, FLOAT);
    tensor.bytes(8, name.as_bytes());
    tensor.bytes(9, &1.0_f32.to_le_bytes().repeat(shape.iter().product()));
    tensor.0
}

/// `ValueInfoProto` of rows of floats.
fn value(name: &str) -> Vec<u8> {
    let mut rows = ProtoMessage::default();
    rows.bytes(2, b"rows");
    let mut columns = ProtoMessage::default();
    columns.number(1, WIDTH as u64);
    let mut shape = ProtoMessage::default();
    shape.bytes(1, &rows.0);
    shape.bytes(1, &columns.0);
    let mut tensor = ProtoMessage::default();
    tensor.number(1, FLOAT);
    tensor.bytes(2, &shape.0);
    let mut kind = ProtoMessage::default();
    kind.bytes(1, &tensor.0);
    let mut value = ProtoMessage::default();
    value.bytes(1, name.as_bytes());
    value.bytes(2, &kind.0);
    value.0
}

/// A protobuf message under construction.
#[derive(Default)]
struct ProtoMessage(Vec<u8>);

impl ProtoMessage {
    /// Adds a field of wire type 0.
    fn number(&mut self, field: u64, value: u64) {
        self.varint(field << 3);
        self.varint(value);
    }

    /// Adds a field of wire type 2: a text, bytes or a message.
    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value.to_le_bytes()[0] | 0x80);
            value >>= 7;
        }
        self.0.push(value.to_le_bytes()[0]);
    }
}

/// Returns the same model with its weights in this file, and the contents of the file.
#[cfg(test)]
pub(crate) fn external(file: &str) -> (Vec<u8>, Vec<u8>) {
    let data = std::cell::RefCell::new(Vec::new());
    let model = with_weights(|name, shape| {
        let bytes = 1.0_f32.to_le_bytes().repeat(shape.iter().product());
        let mut tensor = ProtoMessage::default();
        shape.iter().for_each(|&len| tensor.number(1, len as u64));
        tensor.number(2, FLOAT);
        tensor.bytes(8, name.as_bytes());
        let (offset, length) = (data.borrow().len().to_string(), bytes.len().to_string());
        for (key, value) in [("location", file), ("offset", &offset), ("length", &length)] {
            let mut entry = ProtoMessage::default();
            entry.bytes(1, key.as_bytes());
            entry.bytes(2, value.as_bytes());
            tensor.bytes(13, &entry.0);
        }
        tensor.number(14, 1); // `EXTERNAL`
        data.borrow_mut().extend_from_slice(&bytes);
        tensor.0
    });
    (model, data.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_in_groups_of_seven_bits() {
        let mut message = ProtoMessage::default();
        message.number(1, 300);
        message.bytes(2, b"ab");
        assert_eq!(message.0, [0x08, 0xac, 0x02, 0x12, 2, b'a', b'b']);
    }

    #[test]
    fn the_model_has_the_size_of_its_weights() {
        let weights = 4 * (2 * WIDTH + 1) * WIDTH;
        let len = encoded().len();
        assert!((weights..weights + 500).contains(&len), "{len}");
    }
}
