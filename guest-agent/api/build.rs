//! Generates the messages and the ttrpc service from the .proto.

use std::{env, error::Error, fs, path::Path};

fn main() -> Result<(), Box<dyn Error>> {
    let out = env::var("OUT_DIR")?;
    ttrpc_codegen::Codegen::new()
        .out_dir(&out)
        .inputs(["proto/agent.proto"])
        .include("proto")
        .rust_protobuf()
        .customize(ttrpc_codegen::Customize { async_all: true, ..Default::default() })
        .rust_protobuf_customize(
            ttrpc_codegen::ProtobufCustomize::default().gen_mod_rs(false).generate_getter(false),
        )
        .run()?;
    // Inner attributes are refused by include!().
    for name in ["agent.rs", "agent_ttrpc.rs"] {
        let path = Path::new(&out).join(name);
        let text = fs::read_to_string(&path)?;
        let kept: Vec<&str> =
            text.lines().filter(|l| !l.starts_with("#![") && !l.starts_with("//!")).collect();
        fs::write(&path, kept.join("\n"))?;
    }
    println!("cargo::rerun-if-changed=proto/agent.proto");
    Ok(())
}
